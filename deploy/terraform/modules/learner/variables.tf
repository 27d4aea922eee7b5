variable "run" {
  description = "The run that the machines take part in; see modules/node."
  type = object({
    run         = string
    name        = string
    region      = string
    parameters  = string
    learner     = string
    domain      = string
    zone_arn    = string
    kms_key_arn = string
    tags        = map(string)
  })
}

variable "machine" {
  description = "Settings specific to machines of this role."
  type = object({
    image_id          = string
    root_device       = string
    security_group_id = string
    log_group         = string
    secret_arn        = string
    public_address    = bool
  })
}

variable "subnet_ids" {
  description = "Subnets that the learner may use."
  type        = list(string)
}

variable "instance_type" {
  description = "Instance type."
  type        = string
}

variable "disk_gb" {
  description = "Size of the root volume in GB."
  type        = number
}

variable "bucket_arn" {
  description = "Bucket for the copies of the run's directory."
  type        = string
}

variable "public" {
  description = "Give the learner a public address, for TensorBoard."
  type        = bool
}

variable "running" {
  description = "Whether the learner runs; false keeps everything except the machine."
  type        = bool
}

variable "may_stop" {
  description = "Auto-scaling groups that the learner scales to zero when the run is complete."
  type        = list(string)
}
