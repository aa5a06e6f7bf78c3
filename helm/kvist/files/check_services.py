"""Checks that services are ready and that a model answers.

`check_services.py --ready URL … [--router URL --model NAME] [--ca-file FILE]`; ends with 1 when something is not so in
time.
"""
# ruff: noqa: INP001  A program by itself.

import argparse
import json
import ssl
import sys
import time
import urllib.error
import urllib.request

CALL_TIME_LIMIT_SECONDS = 30.0
PAUSE_SECONDS = 1.0


def ask(url: str, body: dict[str, object] | None = None, *, context: ssl.SSLContext | None = None) -> str:
    """What is wrong with the answer; nothing when it is right."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json"})  # noqa: S310  The chart's own URLs.
    try:
        with urllib.request.urlopen(request, timeout=CALL_TIME_LIMIT_SECONDS, context=context) as response:  # noqa: S310
            response.read()
    except urllib.error.HTTPError as error:
        return f"status {error.code}: {error.read(2_000).decode(errors='replace').strip()}"
    except OSError as error:
        return str(error)
    return ""


def main() -> int:
    """Runs all checks and returns the exit code."""
    parser = argparse.ArgumentParser(description="Checks a Kvist mesh.")
    parser.add_argument("--ready", action="append", default=[], metavar="URL")
    parser.add_argument("--router", metavar="URL")
    parser.add_argument("--model")
    parser.add_argument("--ca-file", metavar="FILE", help="authorities of servers that speak TLS")
    parser.add_argument("--time-limit-seconds", type=float, default=120.0)
    flags = parser.parse_args()
    context = None if flags.ca_file is None else ssl.create_default_context(cafile=flags.ca_file)
    checks: list[tuple[str, dict[str, object] | None]] = [(url, None) for url in flags.ready]
    if flags.model is not None:
        messages = [{"role": "user", "content": "Hello"}]
        body: dict[str, object] = {"model": flags.model, "messages": messages, "max_tokens": 4}
        checks.append((f"{flags.router}/v1/chat/completions", body))
    deadline = time.monotonic() + flags.time_limit_seconds
    for url, body_or_none in checks:
        while problem := ask(url, body_or_none, context=context):
            if time.monotonic() > deadline:
                sys.stderr.write(f"{url}: {problem}\n")
                return 1
            time.sleep(PAUSE_SECONDS)
        sys.stdout.write(f"{url}: ok\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
