"""Replicas of the dense part, kept together by synchronisation: ShadowSync, EASGD, MA, BMUF."""
