"""Engines without the plugin: which they are, what they tell of themselves, whether they answer."""
