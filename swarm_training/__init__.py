"""Volunteers train one model together: gradients are accumulated at everybody's own pace, averaged, and applied."""
