"""The training of a model in stages: blocks live on servers, several peers to a stage; trainers route micro-batches."""
