"""Healthcare: the front desk of a group of clinics."""
