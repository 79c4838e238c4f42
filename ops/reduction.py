"""Operator table: reduction."""
