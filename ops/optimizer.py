"""Operator table: optimizer."""
