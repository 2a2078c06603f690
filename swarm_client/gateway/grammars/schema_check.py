"""Run as a process of its own: reads a grammar from standard input, and prints why it is none, or nothing.

A schema of a stranger may overflow the stack of what compiles it, or take minutes: here that ends this process alone.
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
