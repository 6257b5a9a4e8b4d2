"""A model of one stream's move, built from the tables of `vllm_plugin.states`: A, B, the proxy, the client, the control
plane and the network between them, under a clock of its own."""
