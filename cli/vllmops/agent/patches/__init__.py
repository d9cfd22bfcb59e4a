"""vLLM's defects that vllmops takes away: one module each, and the registry that applies them.

A patch changes attributes of vLLM's classes in place, as soon as their module is imported, and only
where its probe finds the defect: by what scratch objects do, never by a version number.
"""
