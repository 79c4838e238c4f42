"""Operator table: attention."""
