"""Operator table: contrib."""
