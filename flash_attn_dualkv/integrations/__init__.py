"""Shared-prompt attention inside other libraries' models; each module needs the library that it is named after."""
