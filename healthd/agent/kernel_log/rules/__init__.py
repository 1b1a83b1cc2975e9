"""The forms of kernel messages that say something about the hardware, one file a family. Pure."""
