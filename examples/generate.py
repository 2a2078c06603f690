"""Writes text with a model whose blocks are on servers: everything is the stock `generate` of transformers.

    python examples/generate.py "Return a list of"

Without --swarm or --initial-peers it starts two servers on this machine first.
"""

from __future__ import annotations

from little_swarm import connected, flags
from transformers import TextStreamer


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("prompt", nargs="?", default="Return a list of")
    args = parser.parse_args()
    with connected(args) as (model, tokenizer):
        inputs = tokenizer(args.prompt, return_tensors="pt")

        print("\n--- the likeliest words, as they come")
        model.generate(**inputs, max_new_tokens=40, do_sample=False, streamer=TextStreamer(tokenizer))

        print("\n--- three samples, in one batch")
        samples = model.generate(**inputs, max_new_tokens=25, do_sample=True, temperature=0.8, num_return_sequences=3)
        for text in tokenizer.batch_decode(samples, skip_special_tokens=True):
            print("*", " ".join(text.split()))

        print("\n--- the best of four beams")
        (best,) = model.generate(**inputs, max_new_tokens=25, num_beams=4)
        print(tokenizer.decode(best, skip_special_tokens=True))


if __name__ == "__main__":
    main()
