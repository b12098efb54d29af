"""`warmfleet bridge`: reports engines without the plugin, by the KV events that vLLM and SGLang publish over ZMQ."""
