"""How the console is started: on loopback, for a plain address, with what Streamlit must not do switched off."""

import pytest

from ui.__main__ import checked_server, command, main


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://moe.example:443/", "http://[::1]:8000"])
def test_plain_addresses(url: str) -> None:
    assert checked_server(url) == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000", "ftp://x", "file:///etc/passwd", "http://user:secret@x", "http://x?key=1", "http://x:99999", "http://["],
)  # fmt: skip
def test_others_are_refused_without_repeating_them(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--server", url]) == 2
    assert "secret" not in capsys.readouterr().err


@pytest.mark.parametrize("port", ["0", "65536", "-1", "x", "9" * 500])
def test_ports_are_bounded(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--port", port])
    assert len(capsys.readouterr().err) < 500


def test_streamlit_is_kept_quiet_and_closed() -> None:
    flags = set(command("127.0.0.1", 8080))
    assert {
        "--server.headless=true", "--browser.gatherUsageStats=false", "--server.fileWatcherType=none",
        "--server.enableXsrfProtection=true", "--server.enableCORS=true", "--server.address=127.0.0.1",
        "--server.allowedHosts=127.0.0.1", "--server.allowedHosts=localhost", "--server.showEmailPrompt=false",
    } <= flags  # fmt: skip
