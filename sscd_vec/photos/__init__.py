"""Folders of photos and banks of them: what the command line and the web page are made of."""
