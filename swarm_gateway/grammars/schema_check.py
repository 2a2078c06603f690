"""A script for a separate process: it reads a grammar from standard input, and prints why it is invalid, or nothing.

A stranger's schema may overflow the compiler's stack, or compile for minutes. Then only this process ends.
"""

import sys
from contextlib import suppress

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_S = 2
MEMORY_BYTES = 2 << 30


def limit_resources() -> None:
    """Limit what this process may take, as far as the system can; the caller ends it after a time in any case."""
    try:
        import resource
    except ImportError:  # on Windows
        return
    for kind, most in ((resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        with suppress(OSError, ValueError):  # macOS refuses limits of the address space
            resource.setrlimit(kind, (most, most))


def main() -> None:
    limit_resources()
    grammar = LLMatcher.grammar_from_lark(sys.stdin.buffer.read().decode())
    limits = LLParserLimits(verbose_errors=False)
    print(LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits).get_error())


if __name__ == "__main__":
    main()
