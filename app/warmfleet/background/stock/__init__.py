"""Engines without the plugin: their list, their facts, their health checks."""
