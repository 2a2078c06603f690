"""One averaging: who adds up what, what arrives late or never, and what is done again."""
