"""The command line of the proofs.

    python -m areal_agent.conformance URL                       every protocol of a gateway gives the same records
    python -m areal_agent.conformance --templates [PATH ...]    every chat template gets all that an agent sends

Exit codes: 0 all is equal; 1 something differs, or the gateway is gone; 2 the command line is wrong.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from areal_agent.command import Parser, run_command
from areal_agent.conformance.protocols import compare_protocols
from areal_agent.conformance.table import try_templates
from areal_agent.errors import ConfigError
from areal_agent.gateway.auth import find_admin_key


def main(argv: Sequence[str] | None = None) -> int:
    """Play what was asked for, print it, and return 0 if all is equal, else 1."""
    parser = Parser(
        prog="python -m areal_agent.conformance",
        description="Play the same episodes through every protocol of a running gateway, and compare what the ledger "
        "has of them: prompt ids, sampled ids, branches. Nothing is trained. Or play every shape of conversation on "
        "chat templates, without a gateway, and compare the tokens with the text that transformers renders.",
    )
    parser.add_argument("url", metavar="URL", nargs="?", help="the gateway, for example http://127.0.0.1:8000")
    parser.add_argument("--admin-key", metavar="KEY", help="the admin key; others on this machine can see it")
    parser.add_argument("--admin-key-file", metavar="FILE", help="its file (default: $AREAL_AGENT_ADMIN_KEY)")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=48, help="the limit of an answer (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="the seed of every session, or of the plays (%(default)s)")
    told = "chat templates: model folders, .jinja files, folders of them; none: those that installed packages ship"
    parser.add_argument("--templates", metavar="PATH", type=Path, nargs="*", help=told)
    parser.add_argument("--plays", metavar="N", type=int, default=0, help="random plays on templates (%(default)s)")
    options = parser.parse_args(None if argv is None else list(argv))
    if options.templates is not None:
        return try_templates(options.templates, num_plays=options.plays, seed=options.seed)
    if not (options.url or "").startswith(("http://", "https://")):
        raise ConfigError(f"URL is {options.url!r}; give the gateway's, for example http://127.0.0.1:8000")
    admin_key = options.admin_key or find_admin_key(options.admin_key_file, os.environ, option="--admin-key-file")
    return asyncio.run(compare_protocols(options.url, admin_key, seed=options.seed, max_tokens=options.max_tokens))


if __name__ == "__main__":
    run_command(main)
