"""The names of experts, the configuration, and the data types that all other rooms use."""
