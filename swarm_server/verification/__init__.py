"""Judgement of other servers' answers over the blocks that are hosted here, and publication of the evidence."""
