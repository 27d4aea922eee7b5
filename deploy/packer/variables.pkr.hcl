variable "region" {
  type        = string
  description = "Region to build in."
  default     = "us-east-1"
}

variable "copy_to_regions" {
  type        = list(string)
  description = "Further regions that get the images."
  default     = []
}

variable "source" {
  type        = string
  description = "Git repository of Troupe; what is committed there goes into the images."
  default     = "../.."
}

variable "extras" {
  type        = list(string)
  description = "Extras of the package that the images have besides `all`: minatar, mujoco, dm-control, pettingzoo, s3."
  default     = []
}

variable "torch_index" {
  type        = string
  description = "Index of the CPU image's torch: PyPI's own build carries gigabytes of CUDA."
  default     = "https://download.pytorch.org/whl/cpu"
}

variable "cpu_build_type" {
  type        = string
  description = "Machine that builds the CPU image."
  default     = "c6i.large"
}

variable "gpu_build_type" {
  type        = string
  description = "Machine that builds the GPU image; it needs a GPU, for the image is tried on it."
  default     = "g6.xlarge"
}

variable "subnet_id" {
  type        = string
  description = "Subnet to build in; empty: the default VPC's."
  default     = ""
}

variable "instance_profile" {
  type        = string
  description = "Instance profile that lets Session Manager in (AmazonSSMManagedInstanceCore); with it Packer needs no open SSH port. Empty: SSH from this computer's address only."
  default     = ""
}

variable "kms_key_id" {
  type        = string
  description = "Key that encrypts the images; empty: the account's default key. Auto-scaling groups start images under a key of your own only once it grants use to AWSServiceRoleForAutoScaling."
  default     = ""
}

locals {
  stamp = formatdate("YYYYMMDD-hhmm", timestamp())
}
