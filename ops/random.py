"""Operator table: random."""
