"""How families of models write answers: their reasoning and their calls of tools, and the reader of both."""
