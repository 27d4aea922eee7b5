variable "name" {
  description = "Prefix of the bucket's name."
  type        = string
}

variable "kms_key_arn" {
  description = "Key that encrypts the objects."
  type        = string
}

variable "force_destroy" {
  description = "Let `destroy` delete the bucket with all checkpoints in it."
  type        = bool
}

variable "keep_old_versions_days" {
  description = "Days after which replaced and deleted objects are removed for good."
  type        = number
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
}
