"""NYC flights of 2013: departures in, aircraft rotations and late aircraft out."""
