"""`python -m ui [--server URL]`: starts the console on a loopback address, with what Streamlit must not do switched off."""

import argparse
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

APP = Path(__file__).parent / "app.py"
ROOT = APP.parents[1]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# No browser is opened, nothing is reported to anyone, no file is watched, and pages of other sites cannot come in.
SETTINGS = {
    "server.headless": "true",
    "server.fileWatcherType": "none",
    "server.runOnSave": "false",
    "server.enableXsrfProtection": "true",
    "server.enableCORS": "true",  # "limit cross-origin access"
    "server.maxUploadSize": "1",
    "server.showEmailPrompt": "false",
    "server.disconnectedSessionTTL": "60",
    "browser.gatherUsageStats": "false",
    "client.toolbarMode": "minimal",
    "client.showErrorDetails": "type",
    "client.showErrorLinks": "false",
    "logger.hideWelcomeMessage": "true",
    "theme.light.primaryColor": "#0072B2",
    "theme.dark.primaryColor": "#56B4E9",
}


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        server = checked_server(args.server)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    environment = os.environ | {"CONSOLE_SERVER": server, "PYTHONPATH": _python_path()}
    print(f"moe-ladder console: http://{args.host}:{args.port} for the server at {server}", flush=True)
    os.execve(sys.executable, command(args.host, args.port), environment)  # noqa: S606 - no shell, our own interpreter


def command(host: str, port: int) -> list[str]:
    """The command that runs the console."""
    settings = SETTINGS | {"server.address": host, "server.port": str(port)}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    flags += [f"--server.allowedHosts={name}" for name in dict.fromkeys((*LOOPBACK, host))]
    return [sys.executable, "-m", "ui.serve", "run", str(APP), *flags]


def checked_server(url: str) -> str:
    """The URL without a slash at its end. Raises ValueError for what is no plain http(s) address, or holds a password."""
    try:
        parts = urlsplit(url)
        is_plain = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_plain = False
        parts = urlsplit("")
    if not is_plain or parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "--server must be the address of a server without user, password or query, for example "
            "http://127.0.0.1:8000"
        )
    return url.rstrip("/")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ui", description=__doc__.splitlines()[0] if __doc__ else None
    )
    default = os.environ.get("CONSOLE_SERVER") or "http://127.0.0.1:8000"
    parser.add_argument(
        "--server", default=default, help="the control plane to look at; or the variable CONSOLE_SERVER"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; loopback by default")
    parser.add_argument("--port", type=_port, default=8080, help="port of the console")
    return parser


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text[:6]) < 1 << 16:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text[:20]!r} is no port; write a number from 1 to 65535")


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


if __name__ == "__main__":
    sys.exit(main())
