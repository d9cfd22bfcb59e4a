"""``vllmops keys``: the keyring, key by key."""

from __future__ import annotations

from vllmops.support import output

from .add import add
from .export import export
from .import_ import import_keys
from .list_ import list_keys
from .promote import promote
from .push import push
from .retire import retire
from .revoke import revoke
from .rotate import rotate
from .status import status
from .verify import verify

app = output.make_typer_app()


app.command("list", epilog="Example: vllmops keys list --json")(list_keys)
app.command(epilog="Example: vllmops keys add")(add)
app.command(epilog="Example: vllmops keys promote 3f9a1c20")(promote)
app.command(epilog="Example: vllmops keys retire 3f9a1c20")(retire)
app.command(epilog="Example: vllmops keys revoke 3f9a1c20 --yes")(revoke)
app.command("import", epilog="Example: vllmops keys import - < key.hex")(import_keys)
app.command(epilog="Example: vllmops keys export --out /media/usb/keyring.json")(export)
app.command(epilog="Example: vllmops keys push -t https://b --admin-token b.key")(push)
app.command(epilog="Example: vllmops keys rotate --dry-run")(rotate)
app.command(epilog="Example: vllmops keys status")(status)
app.command(epilog="Example: vllmops keys verify - < carrier.txt")(verify)
