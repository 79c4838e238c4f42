"""Operator table: activation."""
