"""Patches for vLLM defects: one module each, and the registry that applies them.

A patch changes attributes of vLLM's classes in place, as soon as their module is imported. It does
so only where its probe finds the defect, by the behaviour of scratch objects, not by the version.
"""
