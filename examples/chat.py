"""A conversation that keeps its cache: each turn sends only what is new, however long the talk has become.

    python examples/chat.py
    printf 'What is a list?\nAnd a tuple?\n' | python examples/chat.py

The shipped model has 4 million parameters: its answers look like documentation, and mean nothing. An empty line, or
the end of the input, ends the talk. Without --swarm or --initial-peers it starts two servers on this machine first.
"""

from __future__ import annotations

import sys

import torch
from little_swarm import connected, flags
from transformers import TextStreamer

ANSWER_TOKENS = 40


def questions():
    """Lines of the input until an empty one; asked for if somebody sits at the terminal."""
    while True:
        print("\nyou: ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            print()
            return
        if not sys.stdin.isatty():
            print(line)
        yield line


def main() -> None:
    with connected(flags(__doc__).parse_args()) as (model, tokenizer):
        cache = model.new_cache()  # the keys and values of the whole talk, on the servers
        talk = torch.tensor([[tokenizer.bos_token_id]])
        for question in questions():
            turn = tokenizer(f"Question: {question}\nAnswer:", add_special_tokens=False, return_tensors="pt").input_ids
            talk = torch.cat([talk, turn], dim=1)
            if talk.shape[1] + ANSWER_TOKENS > model.config.max_position_embeddings:
                print("That was as long a talk as the model can remember.")
                return
            print("model:", end="", flush=True)
            talk = model.generate(
                talk,
                attention_mask=torch.ones_like(talk),
                past_key_values=cache,
                max_new_tokens=ANSWER_TOKENS,
                do_sample=False,
                repetition_penalty=1.2,
                stop_strings=["\n"],
                tokenizer=tokenizer,
                streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            )
            # Where passes are slow, a draft guesses tokens; those that it got wrong were computed in vain.
            how = "with the draft's guesses" if model.speculation.stats.guesses else "each once"
            print(f"[the talk has {talk.shape[1]} tokens; {cache.session.stats.tokens} were computed so far, {how}]")


if __name__ == "__main__":
    main()
