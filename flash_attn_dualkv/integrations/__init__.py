"""Shared-prompt attention in other libraries; a module needs the library of its name."""
