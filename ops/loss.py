"""Operator table: loss."""
