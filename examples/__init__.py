"""Models, data, configs and scripts that show the strategies at work; not part of the installed package."""
