"""The generations that answer requests, whatever API they came by: fields, prompts, grammars, calls of tools."""
