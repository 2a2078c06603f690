"""A script for a separate process: it reads a grammar from standard input, and prints why it is invalid, or nothing.

A stranger's schema may overflow the compiler's stack, or compile for minutes. Then only this process ends.
"""

import resource
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_S = 2
MEMORY_BYTES = 2 << 30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grammar = LLMatcher.grammar_from_lark(sys.stdin.buffer.read().decode())
    limits = LLParserLimits(verbose_errors=False)
    print(LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits).get_error())


if __name__ == "__main__":
    main()
