"""Speed: clusters through their daemons, our engine beside other engines, and where a step's time goes."""
