"""Other engines beside ours on the same prompts, each in a process of its own."""
