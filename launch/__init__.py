"""Starting a command on one or many hosts through an existing launcher."""
