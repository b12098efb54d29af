"""The picker: gateways ask by ext_proc (gRPC) where a request goes, and send the request there themselves."""
