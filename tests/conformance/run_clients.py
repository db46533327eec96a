"""Smoke tests of clients that people use: litellm and langchain-openai, in an environment of their own.

Same choice of server as run_sdk.py: nothing for the fake engine, --model FOLDER, or --base-url URL --name MODEL.
"""

import argparse
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.conformance.sdk_venv import ensure_venv
from tests.conformance.server import served_model

CLIENTS = """
import os
base_url, name = os.environ["BASE_URL"], os.environ["MODEL_NAME"]
import litellm
for provider in ("openai", "hosted_vllm"):
    options = dict(model=f"{provider}/{name}", api_base=base_url, api_key="none", max_tokens=8, num_retries=0,
                   messages=[{"role": "user", "content": "Once upon a time"}])
    whole = litellm.completion(**options)
    assert whole.choices[0].message.content and whole.usage.completion_tokens, whole
    pieces = [c.choices[0].delta.content or "" for c in litellm.completion(**options, stream=True) if c.choices]
    assert "".join(pieces), pieces
    print("litellm", provider, "ok:", repr("".join(pieces)))
try:
    litellm.completion(**options | {"model": "openai/not-here"})
    raise SystemExit("litellm: an unknown model was accepted")
except litellm.NotFoundError:
    print("litellm unknown model ok")
from langchain_openai import ChatOpenAI, OpenAI
chat = ChatOpenAI(model=name, base_url=base_url, api_key="none", max_tokens=8, max_retries=0)
answer = chat.invoke("Once upon a time")
assert answer.content and answer.usage_metadata["output_tokens"], answer
assert "".join(c.content for c in chat.stream("Once upon a time"))
print("langchain ChatOpenAI ok:", repr(answer.content))
text = OpenAI(model=name, base_url=base_url, api_key="none", max_tokens=8, max_retries=0).invoke("Once upon a time")
assert text
print("langchain OpenAI ok:", repr(text))
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", help="a running server, with /v1")
    parser.add_argument("--name", default="smoke", help="model name there")
    parser.add_argument("--model", help="model folder for a real server; empty: the embedded model")
    parser.add_argument("--config", type=Path, help="configuration of the real server")
    args = parser.parse_args()
    python = ensure_venv("clients", ["litellm", "langchain-openai"])
    started = (
        nullcontext(args.base_url) if args.base_url else served_model(args.model, [args.name], args.config)
    )
    with started as base_url:
        env = os.environ | {
            "BASE_URL": base_url,
            "MODEL_NAME": args.name,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        return subprocess.run([python, "-c", CLIENTS], env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
