"""Plumbing that the backends of several ops share, one package per DSL."""
