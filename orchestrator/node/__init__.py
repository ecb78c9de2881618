"""What happens on the node of a trial: its engine's process, from claim to gone, and this node's GPUs and memory."""
