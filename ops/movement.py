"""Operator table: movement."""
