"""What commands and callbacks need of a training run, and what is shown of one."""
