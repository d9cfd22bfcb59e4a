"""Where vllmops keeps its state; the CLI and the agent both ask here.

vllmops runs, shows and serves what is written there: records hold commands. So every
folder that vllmops reads or writes there belongs to the user who runs it, and nobody else but root
can put anything into it, or exchange it.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from .errors import ExitCode, VllmopsError

LINKS = 40  # that Linux follows in one path
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def resolve_home() -> Path:
    """The state directory: ``VLLMOPS_HOME``, or the user's state directory.

    Raises:
        VllmopsError: ``home.unknown``, for a user without a home directory, or of a user who is not
            there; ``home.encoding``, for a name that can't be written down as text; ``home.unsafe``
            (exit code 4) as `require_safe_folder` does.
    """
    return require_safe_folder(locate_home(), sticky=True)


def locate_home() -> Path:
    """Where the state directory is, whoever owns it."""
    chosen = os.environ.get("VLLMOPS_HOME", "")
    try:
        path = Path(chosen).expanduser().absolute() if chosen else find_default_home()
    except RuntimeError as error:
        if name := chosen.startswith("~") and chosen[1:].partition("/")[0]:
            raise VllmopsError(
                "home.unknown",
                f"VLLMOPS_HOME is {chosen}, but there is no user {name} with a home directory",
                f"export VLLMOPS_HOME=./{chosen} if the directory has that name",
                exit_code=ExitCode.USAGE,
            ) from error
        raise VllmopsError(
            "home.unknown",
            f"the home directory of uid {os.getuid()} is unknown: HOME is not set, and the user "
            "database has no entry",
            "for example: export VLLMOPS_HOME=/var/lib/vllmops",
        ) from error
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        # Records, keyrings and answers are JSON: they could not name their own files.
        raise VllmopsError(
            "home.encoding",
            f"the state directory's name is not UTF-8: {os.fsencode(path)!r}",
            "rename the directory, or export VLLMOPS_HOME=/var/lib/vllmops, for example",
        ) from error
    return path


def find_default_home() -> Path:
    # Not at the top: an attached agent runs without platformdirs and has VLLMOPS_HOME set.
    from platformdirs import user_state_path  # noqa: PLC0415

    return user_state_path("vllmops", appauthor=False)


def require_safe_folder(path: Path, *, sticky: bool = False) -> Path:
    """Check that a folder is this user's own, and that nobody else can write to or exchange it.

    Each folder above it, and each link on the way, belongs to this user or to root; others may
    write to such a folder only where it is sticky, as the shared temporary directory is.

    Args:
        path: absolute; what does not exist yet is accepted.
        sticky: whether others may write to it if it is sticky; what lies in it is checked, too.

    Returns:
        `path`, as it was given.

    Raises:
        VllmopsError: ``home.unsafe`` (exit code 4).
    """
    at, links, left = Path("/"), 0, list(reversed(path.parts[1:]))
    while left:
        step = at / left.pop()
        if step.name == "..":
            at = at.parent
            continue
        try:
            status = step.lstat()
        except OSError:
            break  # it does not exist; opening it reports any other reason
        if not stat.S_ISLNK(status.st_mode):
            at = step
            require_safe_component(at, status, path, is_last=not left, sticky=sticky or bool(left))
            continue
        links += 1
        if status.st_uid not in {0, os.geteuid()}:
            raise make_unsafe_error(
                step, path, f"is a symbolic link that belongs to {format_user(status.st_uid)}"
            )
        if links > LINKS:
            break
        target = Path(os.readlink(step))
        at = Path("/") if target.is_absolute() else at
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return path


def create_folder(path: Path) -> Path:
    """Make a folder for this user alone, with those above it that are missing.

    Raises:
        OSError: it can't be made.
        VllmopsError: ``home.unsafe`` (exit code 4), as `require_safe_folder` does.
    """
    create_missing_folders(require_safe_folder(path))
    return require_safe_folder(path)


def create_missing_folders(path: Path) -> None:
    """Make what is missing of a folder's path, each part for this user alone; raises OSError."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def require_safe_component(
    component: Path, status: os.stat_result, path: Path, *, is_last: bool, sticky: bool
) -> None:
    """Raise where a folder on the way to `path`, or it, is not as `require_safe_folder` says."""
    me = os.geteuid()
    if status.st_uid not in ({me} if is_last else {0, me}):
        raise make_unsafe_error(
            component, path, f"belongs to {format_user(status.st_uid)}, not to {format_user(me)}"
        )
    lax = status.st_mode & OTHERS_WRITE
    if not lax or (sticky and status.st_mode & stat.S_ISVTX):
        return
    hint = ""
    if me in {0, status.st_uid}:
        change = "g-w" if lax == stat.S_IWGRP else "700" if is_last else "go-w"
        hint = f"chmod {change} {shlex.quote(str(component))}, or "
    raise make_unsafe_error(
        component, path, f"can be written to by others (mode {status.st_mode & 0o7777:o})", hint
    )


def make_unsafe_error(component: Path, path: Path, reason: str, hint: str = "") -> VllmopsError:
    whose = (
        f"{component} {reason}"
        if component == path
        else f"{component}, on the way to {path}, {reason}"
    )
    return VllmopsError(
        "home.unsafe",
        f"{whose}: vllmops would run what another user puts there",
        f"{hint}set VLLMOPS_HOME to a directory of your own, for example "
        f"{suggest_home_assignment()}",
    )


def suggest_home_assignment(name: str = ".vllmops") -> str:
    """An assignment of VLLMOPS_HOME to a directory of this user, quoted for a shell."""
    import pwd  # noqa: PLC0415

    try:
        return f"VLLMOPS_HOME={shlex.quote(os.path.join(pwd.getpwuid(os.geteuid()).pw_dir, name))}"
    except KeyError:
        return f"VLLMOPS_HOME=/var/lib/vllmops-{os.geteuid()}"


def format_user(uid: int) -> str:
    """A user's name, or the number where there is none."""
    import pwd  # noqa: PLC0415

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"
