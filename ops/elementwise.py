"""Operator table: elementwise."""
