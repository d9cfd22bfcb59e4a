"""``vllmops integrate``: what systemd and Kubernetes need, in their own formats."""

from ...support.output import make_typer_app
from . import kubernetes, systemd

app = make_typer_app()
app.command(epilog="Example: vllmops integrate systemd > /etc/systemd/system/vllmops@.service")(
    systemd.systemd
)
app.command(epilog="Example: vllmops integrate kubernetes --deployment vllm > patch.yaml")(
    kubernetes.kubernetes
)
