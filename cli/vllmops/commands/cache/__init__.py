"""``vllmops cache``: inspect, compare, repair and reset the multimodal and encoder caches."""

from ...support.output import make_typer_app
from . import compare, inspect, repair, reset

app = make_typer_app()


app.command(epilog="Example: vllmops cache inspect -t demo --save before.json")(inspect.inspect)
app.command(epilog="Example: vllmops cache compare -t demo --fail-on warning")(compare.compare)
app.command(epilog="Example: vllmops cache repair -t demo --dry-run")(repair.repair)
app.command(epilog="Example: vllmops cache reset -t demo --timeout 30")(reset.reset)
