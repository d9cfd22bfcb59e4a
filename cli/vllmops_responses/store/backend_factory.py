"""From a URL to the backend that it names, or to a class of the user's own."""

from __future__ import annotations

import os
from importlib import import_module

from vllmops.model.environment import STORE_CLASS
from vllmops.support import urls
from vllmops.support.errors import VllmopsError, make_usage_error

from .backend import Backend, Limits

EXTRA = "pip install 'vllmops-cli[store]'"


def make_backend(url: str, limits: Limits | None = None) -> Backend:
    """The backend for a URL; not opened yet.

    ``?namespace=word`` keeps several stores apart in one database. Where
    ``VLLM_RESPONSES_STORE_BACKEND`` is set to ``package.module.Class``, that class gets the URL as
    it is.

    Raises:
        VllmopsError: ``usage``, or ``store.driver`` where a package is missing.
    """
    limits = limits or Limits()
    if limits.owner_limit < 1:
        raise make_usage_error(
            f"a store for {limits.owner_limit} responses would keep none", "--store-max-size 10000"
        )
    if named := os.environ.get(STORE_CLASS):
        return load_backend_class(named)(url, limits)
    found = urls.parse_store_url(url)
    scheme, rest = found.scheme, url.partition("://")[2]
    url, _ = split_namespace(f"{scheme}{found.topology}://{rest}")
    name = found.query.get(urls.NAMESPACE, "vllmops")
    try:
        if scheme == "memory":
            from .backends.memory import Memory  # noqa: PLC0415

            return Memory(url, limits)
        if scheme == "sqlite":
            from .backends.sqlite import Sqlite  # noqa: PLC0415

            return Sqlite(url, limits, name)
        if scheme == "postgresql":
            from .backends.postgresql import Postgresql  # noqa: PLC0415

            return Postgresql(url, limits, name)
        from .backends.redis import Redis  # noqa: PLC0415

        return Redis(url, limits, name)
    except ModuleNotFoundError as error:
        raise VllmopsError(
            "store.driver", f"{scheme}:// needs the package {error.name}", EXTRA
        ) from error


def load_backend_class(class_path: str) -> type[Backend]:
    """The class that ``VLLM_RESPONSES_STORE_BACKEND`` names.

    Raises:
        VllmopsError: ``usage``.
    """
    module, _, name = class_path.rpartition(".")
    hint = f"{STORE_CLASS}=package.module.Class"
    try:
        found = getattr(import_module(module), name) if module else None
    except (ImportError, AttributeError) as error:
        raise make_usage_error(f"{STORE_CLASS} is {class_path}: {error}", hint) from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise make_usage_error(
            f"{STORE_CLASS} is {class_path}, which is not a "
            "vllmops_responses.store.backend.Backend",
            hint,
        )
    return found


def split_namespace(url: str) -> tuple[str, str]:
    """A URL without its ``namespace``, and that; ``vllmops`` where it has none."""
    start, _, query = url.partition("?")
    given = query.split("&") if query else []
    rest = [parameter for parameter in given if not parameter.startswith("namespace=")]
    names = [parameter.partition("=")[2] for parameter in given if parameter not in rest] or [
        "vllmops"
    ]
    return "?".join([start, *(["&".join(rest)] if rest else [])]), names[-1]
