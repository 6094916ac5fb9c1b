"""The instruments: what devices there are, told by files and by the driver."""
