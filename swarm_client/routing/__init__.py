"""The choice of servers. Pure: a view and costs in, a route out; import ``routing``."""
